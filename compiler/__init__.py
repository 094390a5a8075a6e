"""The compiler: JobSpec to ModelGraph to Plan to RankPrograms, in plain Python and without torch."""
