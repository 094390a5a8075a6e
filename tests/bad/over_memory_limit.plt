import "base/digits.plt"

memory {
  limit = 4 kB #! E0501
}
