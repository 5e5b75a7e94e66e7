"""Public data sets: a catalogue of their files, and a check of a download."""
