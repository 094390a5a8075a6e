# Llama 3.1 8B, fully sharded, as torchtitan trains it. Which devices and batches: benchmarks/predictions.py.
model {
  network = transformers("llama", hidden_size = 4096, intermediate_size = 14_336, num_hidden_layers = 32,
                         num_attention_heads = 32, num_key_value_heads = 8, vocab_size = 128_256,
                         max_position_embeddings = 8192, tie_word_embeddings = false)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 100_000, vocab = 128_256, context = 8192)
  batch  = 16
}

devices {
  gpus      = 8
  kind      = titan_h100
  catalogue = "h100.toml"
}

parallelism {
  zero = 3
}

memory {
  recompute = selective
}

train {
  steps     = 1_000
  precision = bf16(level = O2)
  optimizer = adamw(lr = 3e-4)
}
