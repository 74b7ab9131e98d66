/* Wide tables scroll horizontally. Make them reachable by keyboard. The theme adds their wrappers when the page has loaded. */
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    box.tabIndex = 0
    box.setAttribute("role", "region")
    box.setAttribute("aria-label", "table")
  }
})
