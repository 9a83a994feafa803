"""What several examples share: two models, the text they learn, options, records of runs."""
