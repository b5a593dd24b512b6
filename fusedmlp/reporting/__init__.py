"""From the directories of runs to tables, plots and words: `python -m fusedmlp.reporting DIR...`."""
