"""A run's folder as commands, studies and reports read and write it: its recipe, and what the run leaves behind."""
