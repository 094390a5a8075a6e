"""The grammar of the job language, and malformed snippets with the message each deserves."""
