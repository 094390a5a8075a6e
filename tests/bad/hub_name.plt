import "base/gpt.plt"

model {
  network = transformers("meta-llama/Llama-3.1-8B") #! W0806
}

data {
  source = stdlib(context = 32)
}
