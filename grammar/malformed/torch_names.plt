model {
  network = AutoModel.from_pretrained("gpt2")
}

data {
  batch = 64 * devices.gpus
}

train {
  optimizer = adamw(betas = (0.9, 0.95))
}
