"""What a job does not say, found out before anything is planned: of the machine, the data and the user's own code."""
