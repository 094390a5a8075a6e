import "base/digits.plt"

devices {
  cpus = 2
  kind = h100 #! E0408
}
