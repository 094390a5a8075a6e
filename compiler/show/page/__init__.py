"""One HTML page of a plan, which works offline: views with a shared selection, a search, and a cursor in time."""
