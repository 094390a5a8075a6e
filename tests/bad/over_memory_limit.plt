import "base/digits.plt"

memory {
  limit = 10 kB #! E0501
}
