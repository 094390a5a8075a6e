"""Every reason to reject a job."""
