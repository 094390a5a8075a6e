import "base/gpt.plt"

model {
  network = transformers("gpt2")
  weights = pretrained("absent", quantize = nf4) #! W0712
  adapter = lora(8, ["c_attn"])
}

data {
  source = stdlib(context = 32)
}

parallelism { tensor = 2 } #! E0733
devices { cpus = 2 }
