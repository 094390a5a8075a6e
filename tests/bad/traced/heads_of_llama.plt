import "../base/own.plt"

model {
  network = transformers("llama", num_hidden_layers = 1, hidden_size = 32, num_attention_heads = 4, num_key_value_heads = 2, intermediate_size = 48, vocab_size = 256) #! E0417
}

devices {
  cpus = 4
}

parallelism {
  tensor = 4
}
