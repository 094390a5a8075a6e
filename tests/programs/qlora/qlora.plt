# adapters for a language model in 4 bits; `python qlora.py` saves one
model {
  network = transformers("base")
  loss    = cross_entropy()
  weights = pretrained("base", quantize = nf4)
  adapter = lora(4, ["q_proj", "v_proj"], alpha = 8)
}

data {
  source  = python("qlora:Repetitions")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adamw(lr = 1e-2)
}
