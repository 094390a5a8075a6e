# adapters for a saved language model; `python lora.py` saves one
model {
  network = transformers("base")
  loss    = cross_entropy()
  weights = "base"
  adapter = lora(4, ["q_proj", "v_proj"], alpha = 8)
}

data {
  source  = python("lora:Sentences")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adamw(lr = 1e-2)
}
