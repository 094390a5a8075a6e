import "../base/own.plt"

model {
  network = transformers(
    "llama", num_hidden_layers = 1, hidden_size = 32, num_attention_heads = 4, intermediate_size = 48, vocab_size = 256
  )
  loss = cross_entropy(chunks = 2) #! E0682
}

parallelism {
  tensor      = 2
  tensor_plan = ["lm_head: row_of_whole"]
}
