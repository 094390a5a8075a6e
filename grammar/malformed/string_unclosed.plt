data {
  source = text("corpus.txt)
  batch  = 64
}
