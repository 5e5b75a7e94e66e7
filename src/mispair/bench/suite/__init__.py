"""Which trainings a comparison needs, and running them."""
