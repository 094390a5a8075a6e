import "base/digits.plt"

model {
  loss = contrastive(over = node) #! W0626
}

devices {
  nodes = 2
  cpus  = 1
}
