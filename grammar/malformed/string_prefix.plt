data {
  source = text(f"corpus.txt")
}
