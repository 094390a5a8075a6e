import "base/digits.plt"

devices {
  gpus    = 2
  kind    = a100_80g
  backend = shared_memory #! E0409
}
