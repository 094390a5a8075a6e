"""The rules: every reason to reject a job."""
