import "base/gpt.plt"

model {
  network = llama(layers = 2, width = 64, heads = 4, context = 32, experts = moe(experts = 4, top_k = 2, hidden = 32))
  adapter = lora(8, ["experts.down_proj"], dropout = 0.1) #! E0727
}
