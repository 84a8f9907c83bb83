// Before the first paint: the theme chosen by hand, if any. Otherwise the system's is followed.
{
    const theme = localStorage.getItem("plimsoll-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
