"""Internal: facts about torch's state that it has no API for; the FP8 types import this folder."""
