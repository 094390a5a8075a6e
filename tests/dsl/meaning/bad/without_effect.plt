import "base/good.plt"

parallelism {
  data           = 1
  gradients      = bf16() #! W0103
  schedule       = gpipe #! W0103
  virtual_stages = 2 #! W0103
  sequence       = false #! W0103
}

checkpoint {
  keep = 5 #! W0103
}

evaluate {
  metrics = [accuracy] #! W0103
}

memory {
  offload = [optimizer] #! W0103
}

train {
  no_decay  = ["*.bias"] #! W0103
  optimizer = sgd(dampening = 0.1) #! W0103
}
