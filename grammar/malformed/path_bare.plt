model {
  weights = /data/llama/weights.pt
}

data {
  source = text(~/corpus/a.txt)
}

checkpoint {
  dir = ./kept
}
