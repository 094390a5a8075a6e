import "base/gpt.plt"

model {
  freeze = ["blocks.*.atention.*", "embeddings.*"] #! E0710
}

train {
  no_decay = ["*.bias", "*.norm.weight"] #! W0710
}
