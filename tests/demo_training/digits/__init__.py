"""How the bundled model that reads numbers in images is made: drawn pictures, a trainer and an evaluation."""
