"""Code that several examples share: two models, their text, options, records of runs."""
