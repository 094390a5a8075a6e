import "../base/own.plt"

model {
  network = transformers(
    "minicpm3",
    num_hidden_layers = 1,
    hidden_size = 32,
    intermediate_size = 48,
    num_attention_heads = 4,
    num_key_value_heads = 4,
    q_lora_rank = 16,
    kv_lora_rank = 16,
    qk_nope_head_dim = 8,
    qk_rope_head_dim = 8,
    v_head_dim = 8,
    vocab_size = 256,
  )
}

parallelism {
  tensor = 2 #! E0427
}
