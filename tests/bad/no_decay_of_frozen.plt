import "base/gpt.plt"

model {
  freeze = ["*.bias", "blocks.0.*"]
}

train {
  no_decay = ["*.bias"] #! W0103
}
