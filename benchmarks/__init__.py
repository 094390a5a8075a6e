"""Speed, measured against what an expert writes by hand. Nothing here gates a change; README.md records the figures."""
