{
  "model": {"network": "gpt"}
}
