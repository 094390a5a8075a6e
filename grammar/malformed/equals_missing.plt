data {
  batch 64
  source digits()
}
