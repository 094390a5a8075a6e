import "../base/own.plt"

model {
  network = transformers("opt", num_hidden_layers = 1, hidden_size = 32, num_attention_heads = 4, ffn_dim = 48, vocab_size = 256, word_embed_proj_dim = 32, dropout = 0.0)
}

parallelism {
  tensor = 2 #! E0415
}
