"""What tests share: launchers of real processes, jobs and networks drawn at random, golden files, folders."""
