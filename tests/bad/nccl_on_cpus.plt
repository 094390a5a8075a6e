import "base/digits.plt"

devices {
  backend = nccl #! E0409
}
