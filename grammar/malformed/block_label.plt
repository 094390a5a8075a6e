model "gpt" {
  network = gpt()
}
