import "../base/gpt.plt"

model {
  network = transformers(
    "mixtral", num_hidden_layers = 1, hidden_size = 32, num_attention_heads = 4, num_key_value_heads = 2, intermediate_size = 48,
    num_local_experts = 4, vocab_size = 256, sliding_window = none,
  )
  adapter = lora(4, "down_proj") #! E0727
}

data {
  source = stdlib(context = 32)
}
