import "base/digits.plt"

model {
  loss    = mse()
}
data {
  source  = synthetic(shape = [8], targets = [10])
  sampler = balanced() #! E0328
  shuffle = false #! E0328
}
