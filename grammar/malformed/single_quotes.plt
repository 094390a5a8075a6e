data {
  source = text('corpus.txt')
}
