"""The planner of a browser tab: answers about the text of a job, without torch, processes or a network."""
