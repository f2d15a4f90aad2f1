"""Reading named domains of a data set, and nothing else."""
