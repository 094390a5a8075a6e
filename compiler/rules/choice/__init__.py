"""The choice of a plan: the values of the fields that a job leaves to the compiler."""
