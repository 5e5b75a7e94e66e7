"""The trainings of a comparison."""
