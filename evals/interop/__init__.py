"""Exchange of weights with other programs: exports with model cards, and initial weights of runs."""
