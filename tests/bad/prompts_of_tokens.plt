import "base/gpt.plt"

model {
  network = [embedding(256, 64), attention(heads = 4), linear(256)]
}

data {
  source = synthetic(vocab = 256, context = 32)
}

generate {
  prompts   = ["def "] #! E0356
  tokenizer = "no_tokenizer.json" #! E0355
}
