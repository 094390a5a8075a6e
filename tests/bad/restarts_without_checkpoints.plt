import "base/digits.plt"

launch {
  restarts = 3 #! E0808
}
