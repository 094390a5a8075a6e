import "base/gpt.plt"

model {
  adapter = lora(8, ["qkv"])
  weights = pretrained("weights.safetensors", quantize = nf4) #! E0733 W0712
}
