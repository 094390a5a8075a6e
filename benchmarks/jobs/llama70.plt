# Llama 3 of 70 B parameters on 64 GPUs: planned, not run.
model {
  network = transformers("llama", num_hidden_layers = 80, hidden_size = 8192, intermediate_size = 28672, num_attention_heads = 64, num_key_value_heads = 8, max_position_embeddings = 8192, vocab_size = 128256, tie_word_embeddings = false)
  loss    = cross_entropy()
}

data {
  source = synthetic(vocab = 128_256, context = 8192)
  batch  = 64
}

devices {
  nodes = 8
  gpus  = 8
  kind  = h100
}

parallelism {
  data         = 2
  zero         = 1
  pipeline     = 4
  tensor       = 8
  microbatches = 32
}

memory {
  recompute = full
}

train {
  steps     = 100
  precision = bf16
  optimizer = adamw(lr = 3e-4)
}
