import "base/gpt.plt"

model {
  network = transformers("llama", num_hidden_layers = 2, hidden_size = 16, num_attention_heads = 2, vocab_size = 256)
}

data { source = stdlib(context = 32), documents = 10 }
parallelism { context = 2 } #! E0329
